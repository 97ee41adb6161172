"""Other machines: actors on the nodes of a Ray cluster that run graders, environments and sandboxes."""
