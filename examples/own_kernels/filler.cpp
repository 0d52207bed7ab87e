int filler() {
    return 0;
}
