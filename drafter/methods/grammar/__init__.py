"""Output by a JSON schema, a regular expression, a choice or a grammar, followed through the draft tree."""

from drafter.plugins import Method

METHOD = Method(
    drafters={"forced": "drafter.methods.grammar.drafter:forced"},
    guides={"llguidance": "drafter.methods.grammar.grammars:Grammars"},
)
