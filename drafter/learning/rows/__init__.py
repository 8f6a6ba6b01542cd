"""Rows on their way to what is learnt: at the engine, and at the learner, in bounded memory."""
