"""Code that Inductor compiles for a CPU, and products computed by oneDNN."""
