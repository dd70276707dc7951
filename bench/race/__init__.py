"""Compare `notes` with llama.cpp and llama-cpp-python on prompts with a known prefix, on the same tokens."""
