"""From logits to tokens: drawing, penalties, and grammars that bound what is drawn."""
