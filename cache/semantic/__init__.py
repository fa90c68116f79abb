"""The semantic cache: answers of similar questions, served under a bound on wrong answers.

It runs as a process of its own (service), which the gateway asks through client.py with the messages of messages.py;
question.py says what of a request may differ. Why a neighbour is served, by the functions of a lookup:

1. `SemanticCache._find` in service/semantic_cache.py looks for the same question written differently (normal_form),
   whose answer is served without any risk. Else it embeds the question (embedding), finds its neighbours (index), and
   leaves out those whose answers may not go to this tenant, or probably disagree with each other
   (judge/repeatability.py): all, if the question itself is of that kind.
2. `SemanticCache._candidate` has the policy count the votes of the neighbours for their answers (`evidence_of` in
   policy/posterior.py); one answer wins. Answers that were found to be equal count as one (policy/groups.py).
3. `candidate_of` in service/neighbours.py compares the question with those that have this answer (`compare` in
   wording/comparison.py). A veto forbids the answer; else one of these questions vouches for it, and what differs is
   evidence.
4. `BudgetPolicy.decide` in policy/budget.py makes a risk of the evidence, a higher one of an answer that was found
   wrong before (policy/calibration.py), and serves it if the risk is within the limit that the budget has room for
   (policy/ledger.py). It draws audits as well.

Fresh answers teach the risk: service/learner.py has them compared with stored ones by a judge (judge). inspection keeps
what operators see of decisions, evaluation measures the cache on labelled pairs and streams. model_server.py calls
models at servers. Read service/semantic_cache.py first. Uses entries and stores.
"""
