"""The engine: models, contexts and sequences. The only room that imports llama_cpp."""
