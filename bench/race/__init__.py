"""`notes` beside what llama.cpp and llama-cpp-python have for prompts that were read before, on the same tokens."""
