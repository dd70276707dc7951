"""The engine: models, contexts and sequences on llama.cpp. The only package that imports llama_cpp."""
