"""From files to streams of tokens: sources, tokenizers, and the index that keeps the tokens."""
