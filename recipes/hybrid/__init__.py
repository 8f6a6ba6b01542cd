"""How a small hybrid is made, and a softmax model to compare it with."""
