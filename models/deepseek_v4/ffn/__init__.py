"""The experts' side as a program of its own: items of rows, a ladder of captured sizes, and what each cost."""
