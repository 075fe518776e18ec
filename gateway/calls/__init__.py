"""One call, from its first byte until everything that it took is given back.

The front ends (`openai`, `other_apis`, `rpc`, `batches`) read what a client sent and write what it gets. What a call
takes and gives back is here, in one order for all of them:

        step                             chat, text      responses, messages   gRPC          line of a batch
    1   counted in the metrics           as http         as http               as grpc       no
    2   a drain waits for it             yes             yes                   yes           no
    3   its use will be recorded         yes             yes                   yes           by `batches`
    4   model, right to use it           after body      after body            first         after body
    5   all prompts are checked          yes             yes                   yes           yes
    6   priority                         at most key's   0                     0             below 0
    7   deadline                         of a header     of a header           of the call   none
    8   all answers are charged          yes             yes                   yes           yes
    9   grammar                          yes             yes                   yes           yes
    10  guardrails on all prompts        yes             yes                   yes           yes
    11  answers, merged                  any number      one                   any number    any number
    12  use is recorded before the end   yes             yes                   yes           by `batches`

1 to 3 are done by `Calls.open`, 4 by `CallScope.find`, 5 to 10 by `CallScope.admit`, 11 by `CallScope.events`, 12 by
`CallScope.finished`. Where columns differ, `Origin` has the difference as data, or an argument of `admit`. A client
that leaves ends its call in 5 to 12: over HTTP by `Exchange.until_disconnect`, over gRPC by cancelling the call's task.

However a call is left, what it took is given back in the opposite order: its answers are cancelled, what was charged
for answers that were not submitted is refunded, its use is recorded, a drain waits for it no longer, and the metrics
get its outcome.
"""
