"""The model that ships: it takes notes at prefill and reads words that training never saw."""
