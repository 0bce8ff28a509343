"""Grades an engine of the build-up track (docs/build/grade.md)."""
