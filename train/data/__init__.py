"""Input: text files as rows of byte tokens, by random access."""
