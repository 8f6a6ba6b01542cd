"""How the embedded hybrid was made, and a softmax model to compare it with."""
