"""The config: schema, loading, and what it refuses."""
