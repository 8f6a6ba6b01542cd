"""Budgets: how many draft nodes a step drafts and verifies."""
