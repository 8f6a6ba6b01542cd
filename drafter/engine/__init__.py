"""The decoding loop: sequences in slots, and one step after another over all of them."""
