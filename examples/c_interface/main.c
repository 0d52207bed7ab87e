/* Three keys: the attention that can be done by hand, about 24.01. */
#include <attune/attune.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static attune_tensor dense(float *data, int64_t rows, int64_t features) {
    attune_tensor t = {data, ATTUNE_F32, ATTUNE_CPU, {1, 1, rows, features}, {rows * features, rows * features, features, 1}};
    return t;
}

int main(void) {
    float q[] = {1, 0}, k[] = {1, 0, 0, 1, 1, 1}, v[] = {10, 20, 40}, o[1];
    attune_problem problem;
    attune_problem_init(&problem);
    problem.Hq = problem.Hkv = 1, problem.N = 1, problem.M = 3, problem.dk = 2, problem.dv = 1;
    attune_plan *plan;
    attune_tensors tensors;
    attune_tensors_init(&tensors);
    tensors.q = dense(q, 1, 2), tensors.k = dense(k, 3, 2), tensors.v = dense(v, 3, 1), tensors.o = dense(o, 1, 1);
    if (attune_plan_create(&problem, NULL, &plan) != ATTUNE_OK) {
        fprintf(stderr, "%s\n", attune_last_error());
        return 1;
    }
    const size_t size = attune_plan_workspace(plan);
    void *workspace = malloc(size ? size : 1);
    const attune_status status = attune_run(plan, &tensors, workspace, size);
    if (status != ATTUNE_OK) fprintf(stderr, "%s\n", attune_last_error());
    printf("%s: %.2f\n", attune_plan_kernel(plan), o[0]);
    free(workspace);
    attune_plan_destroy(plan);
    const double w = exp(1 / sqrt(2.0));
    return status != ATTUNE_OK || !(fabs(o[0] - (10 * w + 20 + 40 * w) / (2 * w + 1)) < 1e-4);
}
