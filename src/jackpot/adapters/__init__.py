"""Our corrections, and joint training, inside the trainers of other frameworks: a module or folder for each."""
