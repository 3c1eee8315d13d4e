"""From files to streams of tokens: sources, tokenizers, and the index that stores the tokens."""
