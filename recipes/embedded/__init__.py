"""How the models that ship in `drafter/embedded` were made: data split, base model, draft head."""
