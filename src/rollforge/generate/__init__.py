"""Policy servers: tokens in, tokens and their log-probabilities out."""
