"""A small base that adds up, and a smaller one that drafts for it: leniency can be measured on them in minutes."""
