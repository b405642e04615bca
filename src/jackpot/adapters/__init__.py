"""The methods of this package inside the trainers of other frameworks, one file each."""
