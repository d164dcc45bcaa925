/* What the coder does for a block with a codebook of its own, as plain loops. */

#include <math.h>
#include <stdint.h>

#define LEAF 256 /* as in coder.py, for 2**20 candidates */

typedef uint32_t words[4][LEAF];

/* Philox-4x32-10 of LEAF consecutive candidates (Salmon et al. 2011). */
static void philox(words x, uint32_t first, uint32_t group, uint32_t stream,
                   uint32_t domain, uint32_t k0, uint32_t k1)
{
    for (int n = 0; n < LEAF; n++) {
        x[0][n] = first + n;
        x[1][n] = group;
        x[2][n] = stream;
        x[3][n] = domain;
    }
    for (int round = 0; round < 10; round++) {
        for (int n = 0; n < LEAF; n++) {
            uint64_t p0 = (uint64_t)x[0][n] * 0xD2511F53u;
            uint64_t p1 = (uint64_t)x[2][n] * 0xCD9E8D57u;
            x[0][n] = (uint32_t)(p1 >> 32) ^ x[1][n] ^ k0;
            x[2][n] = (uint32_t)(p0 >> 32) ^ x[3][n] ^ k1;
            x[1][n] = (uint32_t)p1;
            x[3][n] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* The generator alone: 4 * count words, of which it returns a digest. */
uint32_t generate(uint32_t count, uint32_t stream, uint32_t k0, uint32_t k1)
{
    words x;
    uint32_t digest = 0;
    for (uint32_t first = 0; first < count; first += LEAF) {
        philox(x, first, 0, stream, 0, k0, k1);
        for (int j = 0; j < 4; j++)
            for (int n = 0; n < LEAF; n++)
                digest ^= x[j][n];
    }
    return digest;
}

/* Log mean and log maximum of the importance weights in each leaf. */
void score(uint32_t candidates, int dimensions, uint32_t stream, uint32_t k0,
           uint32_t k1, const float *table, const float *loc, const float *inverse_scale,
           float log_volume, float *means, float *maxima)
{
    words x;
    float total[LEAF];
    for (uint32_t first = 0; first < candidates; first += LEAF) {
        for (int n = 0; n < LEAF; n++)
            total[n] = 0;
        for (int d = 0; d < dimensions; d++) {
            if (d % 8 == 0)
                philox(x, first, d / 8, stream, 0, k0, k1);
            const uint32_t *word = x[d % 8 / 2];
            int shift = d % 2 * 16;
            float m = loc[d], s = inverse_scale[d];
            for (int n = 0; n < LEAF; n++) {
                float z = table[(word[n] >> shift) & 0xFFFF];
                float t = (z - m) * s;
                total[n] += (z - t) * (z + t);
            }
        }
        float top = -3e38f, sum = 0;
        for (int n = 0; n < LEAF; n++) {
            total[n] = 0.5f * total[n] - log_volume;
            top = total[n] > top ? total[n] : top;
        }
        for (int n = 0; n < LEAF; n++)
            sum += expf(total[n] - top);
        means[first / LEAF] = top + logf(sum / LEAF);
        maxima[first / LEAF] = top;
    }
}
