"""Models of sentence pairs: a Mixer over tokens, and a transformer encoder to compare it with."""
