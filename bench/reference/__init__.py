"""Compare the logits of this project's engine with those of the paper author's PyTorch code."""
