"""Where models come from: every source becomes an ordinary Hugging Face folder on disk."""
