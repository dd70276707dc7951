"""The subject that shall ship next: it takes notes at prefill and reads words that training never saw."""
