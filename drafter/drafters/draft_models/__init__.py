"""Drafters that are language models themselves, alone (SpecInfer) or one above another (HSD)."""
