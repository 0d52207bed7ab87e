// Lists the kernels of the registry, and runs three keys.
#include <attune/kernel.h>
#ifdef REGISTER
#include <engine_kernels_kernels.h>
#endif

#include <cmath>
#include <cstdio>
#include <vector>

static attune_tensor dense(float *data, int64_t rows, int64_t features) {
    return {data, ATTUNE_F32, ATTUNE_CPU, {1, 1, rows, features}, {rows * features, rows * features, features, 1}};
}

int main() {
#ifdef REGISTER
    for (int i = 0; i < 2; i++) // once more changes nothing
        if (attune_register_engine_kernels() != ATTUNE_OK) return std::fprintf(stderr, "%s\n", attune_last_error()), 2;
#endif
    for (int64_t i = 0; i < attune_num_kernels(); i++) std::printf("kernel %s\n", attune_kernel_at(i)->name);
    float q[] = {1, 0}, k[] = {1, 0, 0, 1, 1, 1}, v[] = {10, 20, 40}, o[1];
    attune_problem problem;
    attune_problem_init(&problem);
    problem.Hq = problem.Hkv = problem.N = 1, problem.M = 3, problem.dk = 2, problem.dv = 1;
    attune_tensors tensors;
    attune_tensors_init(&tensors);
    tensors.q = dense(q, 1, 2), tensors.k = dense(k, 3, 2), tensors.v = dense(v, 3, 1), tensors.o = dense(o, 1, 1);
    attune_plan *plan = nullptr;
    if (attune_plan_create(&problem, nullptr, &plan)) return std::fprintf(stderr, "%s\n", attune_last_error()), 3;
    std::vector<char> workspace(attune_plan_workspace(plan));
    if (attune_run(plan, &tensors, workspace.data(), workspace.size()))
        return std::fprintf(stderr, "%s\n", attune_last_error()), 4;
    std::printf("%s: %.2f\n", attune_plan_kernel(plan), double(o[0]));
    attune_plan_destroy(plan);
    const double w = std::exp(1 / std::sqrt(2.0));
    return !(std::abs(o[0] - (10 * w + 20 + 40 * w) / (2 * w + 1)) < 1e-4);
}
