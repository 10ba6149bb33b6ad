"""Components for samestep: `kind: my_package.every_nth` and `kind: my_package.narrow`."""
