"""Jobs of many nodes: every launcher offers what it sees of its own ranks, the one of group rank 0 pulls it and judges the whole job."""
