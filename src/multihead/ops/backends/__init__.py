"""One module a backend: NAME, `reasons(problem)`, `forward(problem)`; none imports another."""
