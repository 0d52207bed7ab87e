/* Loads two plug-ins with their symbols open to each other; what one sets must not be seen by the other. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void (*set[2])(int);
    int (*get[2])(void);
    if (argc != 3) return 2;
    for (int i = 0; i < 2; i++) {
        void *library = dlopen(argv[i + 1], RTLD_NOW | RTLD_GLOBAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
        *(void **)&set[i] = dlsym(library, "plugin_set_threads");
        *(void **)&get[i] = dlsym(library, "plugin_threads");
        if (!set[i] || !get[i]) return fprintf(stderr, "%s\n", dlerror()), 4;
    }
    set[0](3);
    set[1](5);
    if (get[0]() != 3 || get[1]() != 5) return fprintf(stderr, "%d and %d: expected 3 and 5\n", get[0](), get[1]()), 1;
    return 0;
}
