"""Code for a CPU that Inductor compiles, and products by oneDNN."""
