"""The first day on a GPU: stages of some minutes each, which can be interrupted and gone on with."""
