"""The stand-in's Python half: torch_musa 2.7.1's public names and signatures over ``_MUSAC`` of either engine."""
