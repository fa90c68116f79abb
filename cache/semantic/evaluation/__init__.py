"""What a semantic cache would do on labelled pairs of prompts: `keepgate eval-pairs`."""
