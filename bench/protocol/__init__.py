"""The hypotheses of docs/protocol.md, measured on a model of training/tiny: python -m bench.protocol --help.

What the page leaves open was settled here before the model that shall ship was trained:

* Seeds: the experiment is the name of the measure (`decisions`, `above`, ...), the same for both sorts of words.
* Texts: sizes of the last stage of training, its 450 tokens of a memory, too; one, two and three skills in turn. Half
  of the asked rules are tables, a quarter each dates and amounts; the note index is told by kind, too. H3 has two or
  three skills and the asked one last, H8 two or three rules a skill, H11 and H12 one skill; the agent's and the blocks'
  memories are those of bench/experiments. Held-out words take several tokens and are none of those of one token.
* Cases that are left out are made up for by further ones, until twice as many as are needed have been drawn.
* H1 is of known words, H2 of held-out ones; all others hold if they hold for both.
* H1's erratum, H3, H13 and H16 count direct decisions; those after a chain of thought are told beside them.
* H11: the older version is decoded, so what is or is not rotated is the last one alone. H12 goes by `choice`.
* H15: both caches, by the lowest cosine of all turns. H18: the default without a profile, an erratum; what a
  calibration by the battery that ships chooses is told beside it, and what a prefix cache takes, without a bar.
* R1 to R4 are what the page reports without a bar; they are "reported" with as many cases as they ask. R2 and R3 count
  those of the model as it was given: another setting may tell no values apart, and that is a figure of its own.
* R5 goes by greedy answers, to facts as well as decisions, and a life is a cluster: with 200 of them a splice that
  never differs is within the margin, with 20 it could not be. Of ten questions one each is about an early, a middle
  and a late fact, two about changed ones, three about rules, two about overruled ones. Sessions are dated notes, not
  messages of a chat: the text of a skill has no tokens of the template.
* R6 goes by greedy answers and counts a seam in every skill, as a splice does by default. R7 counts the tokens of the
  blocks that an edit compiles again; the question after it is the same for all S. Both are of training seed 1 alone.
* Differences without any variation get Wilson's half-width for each of their shares, as if these were independent.
"""
