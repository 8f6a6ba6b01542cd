"""Which stack of drafters has the lowest expected time a token: the plan, and the measurements that it needs."""
