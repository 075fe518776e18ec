// A team of threads that run one function in parts: what the kernels split their work over. The split never changes a result:
// every output is computed whole, by one part, in the same order.

#pragma once

namespace disagg {

using PartFunction = void (*)(void* context, int part, int num_parts);

// Runs `function` for parts 0 .. num_parts - 1 and returns when all have ended. num_parts is the size of the team, or 1 where
// the team has one thread or works for another caller.
void run_in_parts(PartFunction function, void* context);

// `body(part, num_parts)` on every thread of the team.
template <class Body>
void in_parts(Body body) {
    run_in_parts([](void* context, int part, int num_parts) { (*static_cast<Body*>(context))(part, num_parts); }, &body);
}

}  // namespace disagg
