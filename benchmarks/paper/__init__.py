"""Every table and figure of both Cake papers, in the simulator, beside what they print."""
