/* SHUFFLE(type, a, b, ...): elements of two vectors by their constant numbers, those of b after those of a. `type` is a
 * vector of integers as wide as theirs. */
#ifndef SHUFFLE_H
#define SHUFFLE_H

#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector((type)(a), (type)(b), __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle((type)(a), (type)(b), (type){__VA_ARGS__})
#endif

#endif
