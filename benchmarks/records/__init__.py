"""Output by JSON schemas: a record-extraction job, with and without drafts, beside another engine's."""
