"""Other rows draft: a suffix index over the texts that an engine has decoded."""

from drafter.plugins import Method

METHOD = Method(drafters={"memory": "drafter.methods.memory.drafter:memory"}, automatic={"memory": "beside"})
