"""Generation as a stage of a Ray Data pipeline of one's own, in the shape of `ray.data.llm`."""
