"""One call, from its first byte until everything that it took is given back.

The front ends (`openai`, `other_apis`, `rpc`, `batches`) read what a client sent and write what it gets. What a call takes
and gives back is here, in one order for all of them:

    step                         chat, text   responses, messages   Generate, GenerateOnce   line of a batch
    1  counted in the metrics    http         http                  grpc                     no
    2  a drain waits for it      yes          yes                   yes                      no: batches stop by themselves
    3  its use is recorded       at its end   at its end            at its end               when its answer is kept
    4  model and rights          after body   after body            before the fields        after body
    5  all prompts are checked   yes          yes                   yes                      yes
    6  priority                  up to key's  0                     0                        below 0
    7  deadline                  header       header                gRPC's                   none
    8  all answers are charged   yes          yes                   yes                      yes
    9  grammar                   yes          yes                   yes                      yes
    10 guardrails on all prompts yes          yes                   yes                      yes
    11 answers                   merged       one                   merged or one            merged
    12 use is recorded           before end   before end            before end               when its answer is kept

1 to 3 are the beginning of `Calls.open`, 4 is `CallScope.find`, 5 to 10 are `CallScope.admit`, 11 is `CallScope.events`, 12 is
`CallScope.finished`. Where the columns differ, `Origin` has the difference as data, or `admit` gets it. A client that leaves
during 5 to 11 ends the call: over HTTP by `Exchange.until_disconnect`, over gRPC by the cancelled task.

However a call is left, what it has is given back in the opposite order: its answers are cancelled, what was charged for answers
that were never submitted is refunded, its use is recorded, a drain stops waiting, and the metrics get the outcome.
"""
