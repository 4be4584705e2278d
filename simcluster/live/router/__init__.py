"""An OpenAI-compatible router in front of real servers: the policies of the simulation, on what is known live."""
