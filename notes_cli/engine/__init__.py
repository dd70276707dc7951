"""The engine: models, contexts and notebooks. The only room that imports llama_cpp."""
