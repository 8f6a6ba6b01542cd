"""How the models in `drafter/embedded` were made: data split, base model, distillation, draft heads."""
