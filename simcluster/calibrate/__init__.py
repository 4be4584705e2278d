"""How fast an instance is: fits of the step-time model, and the cards made from them."""
